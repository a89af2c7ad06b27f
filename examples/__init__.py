"""Short programs to read and adapt. They use the library as your own code would."""
