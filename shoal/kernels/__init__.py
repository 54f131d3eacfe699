"""Triton kernels, each with torch operators that compute the same."""
