"""The lab's page: sliders choose a product, and its predictions appear at once.

`api` answers questions about a product with plain values, `server` serves them and the page, `export` puts both into
one file. All arithmetic is here, in Python; the page in static/ sends queries, and draws the answers.
"""
