"""Parts that sleep instead of computing, for `bench` and `plan`: no run of `apps.grpo` can be made of them."""
