"""Group relative policy optimization (GRPO, arXiv 2402.03300): completions of prompts are sampled by a serving engine
on the devices of the training, rewarded, and compared within the group of one prompt."""
