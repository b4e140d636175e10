"""Connections, HTTP/1.1, and the middleware around every route."""
