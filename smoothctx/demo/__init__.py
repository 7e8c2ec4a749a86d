"""The demo: a real agent on a real engine, once with in-line rewrites and once with lookahead."""
