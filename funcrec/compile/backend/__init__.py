"""From a staged graph to a program: Inductor, one library per program, oneDNN, products, exchanges."""
