"""The door of every product: what is asked, whether it fits, and how it runs."""
