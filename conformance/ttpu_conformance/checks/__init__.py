"""The checks, by subject; `ttpu_conformance.check.all_checks` imports them, which registers them."""
