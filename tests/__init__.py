"""The suite: folders mirror the package's; `support` has what tests build, `tooling` tests the tests' own tools."""
