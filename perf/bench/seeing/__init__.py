"""Parts of the benchmark of images: encoding them, and text beside a flood of them."""
