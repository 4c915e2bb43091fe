"""What a request's text must be, kept while it is generated: checked, compiled, followed token by token."""
