"""The Chorus server."""
