"""The arithmetic of experts, on any device."""
