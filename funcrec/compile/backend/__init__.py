"""What turns a staged graph into a program: Inductor, one library for each program, oneDNN, products, exchanges."""
