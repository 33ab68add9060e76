"""The lab's page: a product is chosen with sliders, and what is predicted of it is seen at once.

`api` answers questions about a product with plain values, `server` serves them and the page, `export` puts both into
one file. All arithmetic is here, in Python; the page in static/ asks, and draws what it is told.
"""
