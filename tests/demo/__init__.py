"""The demo: each scenario is run as it is and with `import fusepatch`, and the results are shown side by side."""
