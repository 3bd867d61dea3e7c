"""The eviction policies, one file each. `policy/registry.py` has their names."""
