"""What can be checked of the kernels and the demo pair on the device at hand, in one report."""
