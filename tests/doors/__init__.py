"""Real entry points of frameworks, one program each. Other environments start them by path, so they import each other
as scripts do."""
