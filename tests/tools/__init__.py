"""Programs of a checkout: the matrix, tox.ini, upstreams' own tests, the files of a new patch."""
