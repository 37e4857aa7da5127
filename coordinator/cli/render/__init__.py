"""Text, tables and pictures of devices, links, plans and graphs."""
