// The mail kernel, compiled for the host: the .cu file as it is.
#include "runtime.h"

#include "mail.cu"
