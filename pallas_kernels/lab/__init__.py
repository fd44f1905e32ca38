"""The kernel lab: what shows, without a GPU, whether a kernel is right and compiles well."""
