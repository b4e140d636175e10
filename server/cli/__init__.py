"""The `chorus` command and what it runs."""
