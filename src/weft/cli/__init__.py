"""The command line: `weft show`, `plan` and `run`, and the way to `demo` and `bench`."""
