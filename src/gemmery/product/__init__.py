"""The entry of every product: its arguments, their checks, and how it runs."""
