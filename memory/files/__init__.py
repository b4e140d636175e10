"""An adapter's files on disk, which strangers write: found, parsed and checked, never trusted."""
