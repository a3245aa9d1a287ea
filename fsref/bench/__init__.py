"""Measuring: what fsref costs against the limit of the machine, and against what a user would pick instead.

Every figure is taken side by side in one run: the same bytes, interleaved repeats, medians and ranges of ratios. Nothing asserts a time.
"""
