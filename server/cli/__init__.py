"""The `chorus` command and its subcommands."""
