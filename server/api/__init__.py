"""The HTTP routes: parsing of requests and formats of responses."""
