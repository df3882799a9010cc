"""What writes the generated pages and figures."""
