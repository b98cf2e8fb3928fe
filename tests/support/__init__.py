"""What tests share: inputs, references, ways to run a step, programs to build and to ask, and the documents."""
