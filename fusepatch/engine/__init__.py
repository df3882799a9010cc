"""How a patch gets in and out of a foreign module. This package names no upstream."""
