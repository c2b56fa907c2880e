import sys

from verl_otb.report import main

sys.exit(main())
