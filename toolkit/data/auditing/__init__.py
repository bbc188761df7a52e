"""What the rows of a data set are like, and what is wrong with them."""
