"""`other_plugin` as VERL_USE_EXTERNAL_MODULES loads it: by its import."""

import other_plugin

other_plugin.register()
