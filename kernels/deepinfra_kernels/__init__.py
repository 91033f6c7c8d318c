"""Kernels for CPUs: C++ built on the machine that runs it, called through ctypes. Importing this loads no torch."""
