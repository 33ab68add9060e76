"""Device code: schedules, tile orders, operand loaders, the dot, epilogues and stores.

Everything here is a `@triton.jit` function and imports only Triton; `specialized` and `any_width` are in Gluon and are
imported only where their schedules are available. A kernel takes the other parts as `tl.constexpr` parameters, one
parameter a function, so that a new loader or epilogue never touches a main loop.
"""
