"""`python -m fusepatch bench`: implementations of the same loss timed on this machine, each checked, in one run.

Nothing here is imported by `import fusepatch`.
"""
