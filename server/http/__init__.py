"""Connections, HTTP/1.1 on them, and middleware around every route."""
