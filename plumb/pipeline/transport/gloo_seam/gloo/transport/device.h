#include "gloo_interface.h"
