"""Make a program from a staged graph: Inductor, one library per program, oneDNN, products, exchanges."""
