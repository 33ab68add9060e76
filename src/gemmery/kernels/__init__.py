"""Device code: schedules, tile orders, operand loaders, the dot, epilogues and stores.

Everything here is a `@triton.jit` function and imports only Triton; `cluster` is in Gluon and is imported only where
`clusters.available` says so. A kernel takes the other parts as `tl.constexpr` parameters, one parameter a function, so
that a new loader or epilogue never touches a main loop.
"""
