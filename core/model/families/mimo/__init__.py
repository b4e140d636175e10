"""MiMo-V2-Flash: how its configuration is read, and its layers."""
