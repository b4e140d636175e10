"""The routes: what requests mean, and what is answered."""
