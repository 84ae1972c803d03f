"""Benchmarks: each module has `measure() -> Iterator[Figure]`; figures are ratios to a reference of the same run."""
