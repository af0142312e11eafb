"""Jobs that people have, each as a script with this library and with the one that does it best."""
