"""The loss of a device or a link: plans made ahead, and workers that wait for each other."""
