"""Files of adapters that were uploaded, and how they get there."""
