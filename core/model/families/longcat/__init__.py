"""LongCat-Flash: how its configuration is read, and its layers."""
