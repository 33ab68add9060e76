"""Device code: schedules, tile orders, operand loaders, the dot, epilogues and stores.

Everything here is a `@triton.jit` function and imports only Triton; `specialized` and `any_width` are in Gluon and are
imported only where their schedules are available. A kernel takes each of its other parts as a `tl.constexpr`
parameter. So a new loader or epilogue does not change a main loop.
"""
