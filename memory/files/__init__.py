"""An adapter's files on disk, which come from strangers: they are found, parsed and checked, never trusted."""
