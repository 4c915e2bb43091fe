"""Load tests: what a server does under load, and what each KV layout costs on the wire."""
