"""What the project's own tests share."""

import hypothesis

# For `tox -e sanitize`; the default hundred is enough to see that nothing dies.
hypothesis.settings.register_profile("long", max_examples=2000)
