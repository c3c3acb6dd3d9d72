"""`python -m reader`: a thin file for each verb, and how they read their command lines."""
